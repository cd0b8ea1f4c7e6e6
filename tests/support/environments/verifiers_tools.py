"""The task `lookup` as a taskset of verifiers 0.4 whose tools are a server of its own."""

from __future__ import annotations

from typing import Any

import verifiers.v1 as vf

__all__ = ["LookupTools"]

VALUES = {"a": 37, "b": 61, "c": 5, "d": 12}


class Tools(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    async def get(self, key: str) -> str:
        """The value of a key."""
        return str(VALUES[key])


class LookupTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def called(self, trace: vf.Trace) -> float:
        return 0.5 if any(node.message.role == "tool" for node in trace.nodes) else 0.25

    @classmethod
    def toolsets(cls, config: Any) -> list[vf.Toolset]:
        return [Tools(vf.ToolsetConfig())]


class LookupTools(vf.Taskset[LookupTask, vf.TasksetConfig]):
    def load(self) -> Any:
        for keys in ("a+c", "b+d"):
            yield LookupTask(vf.TaskData(prompt=keys), self.config.task)


if __name__ == "__main__":
    Tools.run()
