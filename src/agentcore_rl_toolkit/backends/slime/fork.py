"""A forked rollout in slime's hands: several samples where slime's buffers expect one."""

from __future__ import annotations

from typing import Any


class Fork(list[Any]):
    """The samples of one forked rollout: a list, as slime takes several samples, that also answers as one sample.

    slime 0.3.1 puts groups of an aborted step back into its buffer (``--partial-rollout``, fully asynchronous
    rollouts) and reads and writes the attributes below on every member without looking whether it is a list. What it
    writes goes to all samples; a finished fork comes back out of the buffer as it went in.
    """

    @property
    def status(self) -> Any:
        return self[0].status

    @property
    def reward(self) -> Any:
        return self[0].reward

    @property
    def index(self) -> Any:
        return self[0].index

    @property
    def response(self) -> str:
        return str(self[0].response)

    @property
    def response_length(self) -> int:
        return sum(s.response_length for s in self)

    @property
    def metadata(self) -> Any:
        return self[0].metadata

    @property
    def session_id(self) -> Any:
        return self[0].session_id

    @property
    def loss_mask(self) -> list[int]:
        return [m for s in self for m in s.loss_mask]

    @loss_mask.setter
    def loss_mask(self, mask: list[int]) -> None:
        # slime masks old tokens of a partial rollout by one list over all of them.
        start = 0
        for sample in self:
            sample.loss_mask = mask[start : start + sample.response_length]
            start += sample.response_length
