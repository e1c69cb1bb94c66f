# SPDX-License-Identifier: Apache-2.0
"""Ask something that may never answer: in a thread of its own, with a deadline.

No signal ends a read that waits for a driver's lock, nor a name service that waits for a server.
A thread that does not come back costs nothing but itself.
"""

from __future__ import annotations

import _thread
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class NoAnswerError(Exception):
    """Say that the answer is not there yet."""


class BackgroundCall(Generic[T]):
    """One question, at work."""

    __slots__ = ("_answers", "_done", "_fault")

    def __init__(self, question: Callable[[], T]) -> None:
        self._answers: list[T] = []
        self._fault: BaseException | None = None
        self._done = _thread.allocate_lock()
        self._done.acquire()
        try:
            _thread.start_new_thread(self._ask, (question,))
        except RuntimeError:  # users' processes fill the node
            self._fault = NoAnswerError()
            self._done.release()

    def _ask(self, question: Callable[[], T]) -> None:
        try:
            self._answers.append(question())
        except BaseException as fault:  # raised again for the caller that waits
            self._fault = fault
        self._done.release()

    def wait(self, seconds: float) -> bool:
        """Return whether the answer is there, at the latest after so many seconds."""
        if not self._done.acquire(timeout=seconds):
            return False
        self._done.release()
        return True

    def answer(self, seconds: float = 0.0) -> T:
        """Return the answer, at the latest after so many seconds; raise what the question raised.

        Or NoAnswerError, where there is none in time.
        """
        if not self.wait(seconds):
            raise NoAnswerError
        if self._fault is not None:
            raise self._fault
        return self._answers[0]


class PatientCaller(Generic[T]):
    """Put one question at a time: while one does not come back, nobody asks again."""

    def __init__(self, patience: float) -> None:
        self.patience = patience  # seconds
        self.late: BackgroundCall[T] | None = None

    def ask(self, question: Callable[[], T]) -> T:
        """Return the answer; raise what the question raised, or NoAnswerError.

        Who waited once in vain is not waited for again, and its answer is as old as the question.
        """
        if self.late is not None and not self.late.wait(0.0):
            raise NoAnswerError
        self.late = BackgroundCall(question)
        answer = self.late.answer(self.patience)
        self.late = None
        return answer
