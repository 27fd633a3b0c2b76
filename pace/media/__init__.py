"""Images and sound, from bytes, files and objects to arrays. This package does not depend on any model."""
