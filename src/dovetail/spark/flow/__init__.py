"""The protocol of a flow: steps, intents, commits, progress."""
