"""Forms of answers, one file each; they are independent of the engine."""
