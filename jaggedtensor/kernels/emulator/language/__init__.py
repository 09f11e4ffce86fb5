"""Gluon's language, emulated. Importing this registers every emulated name."""
