"""A LangGraph agent that knows nothing of BAPO, in a Python with langgraph and langchain-openai:

    bapo agent latest -- /path/to/python examples/agents/langgraph_agent.py

For each episode `bapo agent` sets OPENAI_BASE_URL and OPENAI_API_KEY and writes the prompt to standard input.
"""

import json
import re
import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent

prompt = json.load(sys.stdin)


@tool
def get(key: str) -> str:
    """The value of a key."""
    return str(prompt["answer"]["values"].get(key, "unknown key"))


@tool
def calc(expression: str) -> str:
    """x+y or x-y of two integers, modulo 100."""
    found = re.fullmatch(r"\s*(\d+)\s*([-+])\s*(\d+)\s*", expression)
    if found is None:
        return "invalid expression"
    left, right = int(found[1]), int(found[3])
    return str((left + right if found[2] == "+" else left - right) % 100)


agent = create_react_agent(ChatOpenAI(model="policy", max_retries=8), [get, calc])
messages = agent.invoke({"messages": prompt["messages"]}, {"recursion_limit": 30})["messages"]
print(float(f"<answer>{prompt['answer']['value']}</answer>" in messages[-1].text))  # the reward
