"""Commands `pace` and `python` that start with all libraries imported. A server imports them, which takes seconds of
processor time, runs nothing else, and forks for each command.

`python ready_commands.py serve SOCKET` is the server, and `python ready_commands.py SOCKET pace|python ARGUMENTS` runs
a command. The command has the streams, the folder and the environment of the caller, which returns its exit code.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import socket
import sys

MOST_BYTES = 1 << 17
"""Maximum size of a command's arguments and environment."""


def serve(path: str) -> None:
    """Runs commands until the server's stdin ends. Prints on stdout when it is ready."""
    import runpy
    import select

    import pace.llm.generator
    import pace.llm.loading.load  # noqa: F401
    from pace.assets import TINY
    from pace.cli import main
    from pace.tokenizer.loading import load_tokenizer

    load_tokenizer(TINY)  # imports the parts of transformers that tokenizers need
    gc.collect()
    gc.freeze()  # so that garbage collection in a child copies no pages of existing objects

    def run(command: dict, streams: list[int]) -> None:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        sys.stdin, sys.stdout, sys.stderr = (
            open(number, mode, encoding="utf-8", closefd=False) for number, mode in enumerate("rww")
        )
        os.chdir(command["folder"])
        os.environ.clear()
        os.environ.update(command["environment"])
        name, *arguments = command["arguments"]
        if name == "pace":
            sys.argv = ["pace", *arguments]
            sys.exit(main())
        sys.argv = arguments
        sys.path.insert(0, os.path.dirname(os.path.realpath(arguments[0])))
        runpy.run_path(arguments[0], run_name="__main__")

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        print("ready", flush=True)
        while listener in select.select([listener, sys.stdin], [], [])[0]:
            connection, _ = listener.accept()
            message, streams, *_ = socket.recv_fds(connection, MOST_BYTES, 3)
            if os.fork() == 0:  # this child waits for the command instead of the server
                child = os.fork()
                if child == 0:
                    listener.close(), connection.close()
                    run(json.loads(message), streams)
                    return
                code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                connection.send(str(code if code >= 0 else 128 - code).encode())
                os._exit(0)
            for descriptor in (connection.detach(), *streams):
                os.close(descriptor)
            with contextlib.suppress(ChildProcessError):  # none is left
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


def ask(path: str, arguments: list[str]) -> int:
    """Runs a command on the server, and returns its exit code."""
    command = {"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ)}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(path)
        socket.send_fds(connection, [json.dumps(command).encode()], [0, 1, 2])
        return int(connection.recv(16) or 1)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        sys.exit(ask(sys.argv[1], sys.argv[2:]))
