"""pytest plugins of this suite: which tests a run has, in which order, and how long they took."""
