"""Ctrl-C where a test wants it."""


def interrupt_call(monkeypatch, owner, name, number):
    """In place of the n-th call of a function; returns the arguments of all its calls."""
    real, calls = getattr(owner, name), []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == number:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(owner, name, interrupted)
    return calls
