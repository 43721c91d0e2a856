"""The digest stored with every document and file."""

import json
from collections.abc import Mapping
from typing import Any

import xxhash

__all__ = ["canonical", "digest_of"]


def digest_of(data: Any) -> str:
    """Hash a buffer. Detects damage; does not resist an attacker.

    Examples
    --------
    >>> digest_of(b"row")
    'da0e947a60ca106d'
    """
    return xxhash.xxh3_64_hexdigest(data)


def canonical(document: Mapping[str, Any]) -> bytes:
    """Serialize a JSON document to the bytes that its digest covers."""
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
