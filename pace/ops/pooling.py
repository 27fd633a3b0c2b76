"""Names of the ways in which the rows of a text become one row."""

POOLINGS = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
"""sentence-transformers' names, in the order in which it concatenates several."""
