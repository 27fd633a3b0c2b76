"""Models of pace for kani: `from kani.ext.pace import PaceEngine`, and `kani pace:MODEL` on the command line.

Importing it imports neither torch nor pace, since the command line of kani imports every extension.
"""

__all__ = ["CLI_PROVIDERS", "PaceEngine"]


def chat_pace(model_id):
    """The engine of `kani pace:MODEL`, where MODEL is a directory, a GGUF file or a Hub id."""
    from pace.integrations.kani import PaceEngine

    return PaceEngine(model_id, show_reasoning_in_stream=True)


CLI_PROVIDERS = [("pace", [], chat_pace)]


def __getattr__(name):
    if name != "PaceEngine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pace.integrations.kani import PaceEngine

    return PaceEngine
