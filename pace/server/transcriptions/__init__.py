"""Transcriptions of sound: the form of a request, and its answer."""
