"""Reduces Spark's errors to the sentences that a user can act on."""

import re

__all__ = ["explain_spark"]

_CONDITION = re.compile(r"^\s*\[([A-Z][A-Z0-9_.]*)\]\s*")
_CAUSE = re.compile(r"^(?:Caused by|\s*): (?:[\w$]+\.)*[\w$]+: (?P<message>.*)", re.MULTILINE)
_SQLSTATE = re.compile(r"\s*SQLSTATE: \w+.*", re.DOTALL)
_SENTENCE = re.compile(r"(.*?[.!?])(?:\s|$)", re.DOTALL)


def explain_spark(error: BaseException) -> str:
    """What failed, and the innermost reason, of a Spark error.

    Examples
    --------
    >>> explain_spark(ValueError("[PATH_NOT_FOUND] Path does not exist: file:/x. SQLSTATE: 42K03"))
    'Path does not exist: file:/x.'
    """
    text = str(error)
    chain = [match["message"] for match in _CAUSE.finditer(text)] or [text.strip()]
    sentences = [_first_sentence(message) for message in (chain[0], chain[-1])]
    return " ".join(dict.fromkeys(sentence for sentence in sentences if sentence))


def _first_sentence(message: str) -> str:
    plain = _SQLSTATE.sub("", _CONDITION.sub("", message)).strip()
    match = _SENTENCE.match(plain)
    sentence = match[1] if match else plain
    if not sentence:
        return ""
    return " ".join(sentence.split()).removesuffix(".") + "."
