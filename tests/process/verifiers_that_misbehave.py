"""Rewards for tests of the grader, named by dotted path: each does one thing that a user's verifier may do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from fractions import Fraction

import numpy as np

from bapo.core.types import Prompt


def text_as_reward(prompt: Prompt, text: str) -> object:
    """Whatever the text says: a number, or what is no reward."""
    values = {
        "nan": float("nan"),
        "none": None,
        "text": "1.0",
        "true": True,
        "np.float32": np.float32(0.5),
        "np.nan": np.float16("nan"),
        "np.true": np.bool_(True),
        "np.false": np.bool_(False),
        "np.int": np.uint8(1),
        "array": np.array(0.25),
        "array of two": np.array([0.0, 1.0]),
    }
    return values[text] if text in values else float(text)


def obey(prompt: Prompt, text: str) -> float:
    """Do what the text says."""
    if text == "raise":
        raise ValueError("cannot read this")
    if text == "hang":
        time.sleep(600)
    if text == "exit":
        os._exit(7)
    if text == "print":
        sys.stdout.write("a verifier that prints\n")
        sys.stdout.flush()
    return 1.0


def hungry(prompt: Prompt, text: str) -> float:
    """Take 600 MB here or in a process of its own, and make a wrong response of every error, as many verifiers do."""
    eat = "import time; eaten = b'x' * (600 << 20); time.sleep(600)"
    try:
        if text == "here":
            exec(eat)
        if text == "elsewhere":
            subprocess.run([sys.executable, "-c", eat], check=True)
    except Exception:
        return 0.0
    return 1.0


def pid(prompt: Prompt, text: str) -> float:
    """Leave the grading process's id where the text says."""
    with open(text, "w") as file:
        file.write(str(os.getpid()))
    time.sleep(600)
    return 1.0


def endless_pattern(prompt: Prompt, text: str) -> float:
    """As `pid`, and then a regular expression that takes 2^60 steps and lets no other thread run."""
    with open(text, "w") as file:
        file.write(str(os.getpid()))
    return float(bool(re.fullmatch("(a+)+b", "a" * 60)))


def child(prompt: Prompt, text: str) -> float:
    """Start a process, leave its id where the text says, and hang."""
    process = subprocess.Popen(["sleep", "600"])
    with open(text, "w") as file:
        file.write(str(process.pid))
    time.sleep(600)
    return 1.0


class SpeechlessError(Exception):
    """An error whose words cannot be had."""

    def __str__(self) -> str:
        """Raises."""
        raise RuntimeError("no words")


def unspeakable(prompt: Prompt, text: str) -> object:
    """What cannot be shown, or is too long to be: raised, or returned."""
    if text == "speechless":
        raise SpeechlessError
    if text == "long":
        raise ValueError("x" * 20_000_000)
    if text == "half":
        raise ValueError("half a character: \ud800")
    return {"integer": 10**5000, "fraction": Fraction(10**400)}.get(text, 1.0)


def forks(prompt: Prompt, text: str) -> float:
    """Fork, and return in both processes; the copy's id is left where the text says."""
    if text == "fine":
        return 1.0
    copy = os.fork()
    if copy:
        with open(text, "w") as file:
            file.write(str(copy))
    return 0.5 if copy else 0.25


def closes(prompt: Prompt, text: str) -> float:
    """Close everything that is open, and leave a thread that does not end."""
    if text == "close":
        threading.Thread(target=time.sleep, args=(600,)).start()
        os.closerange(3, 256)
    return 1.0


def late(prompt: Prompt, text: str) -> float:
    """Take three seconds for one text, and none for others."""
    if text == "late":
        time.sleep(3)
    return 0.25 if text == "late" else 1.0


def print_strange_text(prompt: Prompt, text: str) -> float:
    """Print what ASCII, and what even UTF-8 cannot carry."""
    print("größer ✓ 数")  # noqa: T201
    print("\ud800", file=sys.stderr, flush=True)  # noqa: T201
    return 1.0


def print_to_a_full_disk(prompt: Prompt, text: str) -> float:
    """Print where nothing can be written."""
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, 1)
    os.dup2(full, 2)
    print("x" * 100_000, flush=True)  # noqa: T201
    sys.stderr.write("y" * 100_000)
    sys.stderr.flush()
    return 1.0
