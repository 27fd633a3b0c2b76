"""Windows of the layers of the models on which caches are tested."""

WINDOWS = {
    "half": (None, 20, None, 20),
    "most": (None, 20, 20, 20),
    "short": (None, 5, 5),
    "two windows": (None, 7, 40, 40),
    "blocks": (None, 32, 32),
    "all": (20, 20),
    "all short": (3, 3),
    "all, two windows": (33, 9),
}
