"""An environment with two tools, which the model calls to find hidden values. In the folder of the repository:

bapo train deploy/configs/demo-agents.toml --agents.rollout env:examples/agents/environment.py:Lookup
"""

import json
import re


def tool(name, argument, description):  # as OpenAI's API takes it
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


class Lookup:
    """One episode: a sum such as a+b, whose values only the tool `get` knows."""

    tools = (tool("get", "key", "The value of a key."), tool("calc", "expression", "x+y or x-y, modulo 100."))

    def reset(self, prompt):
        """Begin; the conversation is that of the prompt."""
        self.values, self.right = prompt.answer["values"], str(prompt.answer["value"])

    def step(self, message):
        """Returns: what the model reads next, the reward of this step, and whether the episode has ended."""
        if calls := message.get("tool_calls"):
            answers = [(call["id"], self.run(call["function"])) for call in calls]
            return [{"role": "tool", "tool_call_id": key, "content": text} for key, text in answers], 0.0, False
        return None, float(f"<answer>{self.right}</answer>" in (message.get("content") or "")), True

    def run(self, call):
        """A model may write anything: what it calls wrongly, it is shown."""
        try:
            given = json.loads(call["arguments"])
            if call["name"] == "get":
                return str(self.values[given["key"]])
            left, sign, right = re.fullmatch(r"\s*(\d+)\s*([-+])\s*(\d+)\s*", given["expression"]).groups()
            return str((int(left) + int(sign + right)) % 100)
        except (ValueError, KeyError, TypeError, AttributeError):
            return "invalid arguments"
