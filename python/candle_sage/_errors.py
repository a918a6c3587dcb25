"""Errors that say what, got, allowed and a hint."""


def _error(what, got, allowed, hint):
    return ValueError(f"{what}\n  got:     {got}\n  allowed: {allowed}\n  hint:    {hint}")
