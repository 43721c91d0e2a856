"""Durable storage: files created exactly once, documents, state files, locks, verification."""
