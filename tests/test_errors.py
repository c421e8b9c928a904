"""An old name, until test_ddpo.py does without it."""

import sys

import pytest


def error_of(monkeypatch, capsys, module, *arguments):
    """Runs a script's main; returns what it ends with."""
    monkeypatch.setattr(sys, "argv", [module.__file__, "--device", "cpu", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        module.main()
    return str(end.value) if isinstance(end.value.code, str) else capsys.readouterr().err
