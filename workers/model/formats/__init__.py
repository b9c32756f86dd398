"""Formats of drafts on disk. Each public format is one file that registers itself; no other file names it."""
