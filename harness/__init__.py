"""Draftproof: what can be said about any speculative-decoding engine. Imports no engine."""
