"""The same by a program of its own, on any host, with the URL and the token file that `bapo agent RUN` prints:

BAPO_TOKEN_FILE=outputs/demo-agents/tokens/agent/token python examples/agents/outside.py http://127.0.0.1:8720
"""

import sys

from environment import Lookup
from openai import OpenAI

from bapo.transport.episode_client import EpisodeClient


def play(url):
    """Run episodes until none comes for five seconds. Returns: their rewards."""
    service, rewards = EpisodeClient(url), []
    while episodes := service.open(1, wait_s=5):
        game, model = Lookup(), OpenAI(base_url=episodes[0].base_url, api_key=episodes[0].key, max_retries=8)
        game.reset(episodes[0].prompt)
        messages, is_done = episodes[0].prompt.messages, False
        while not is_done:
            reply = (
                model.chat.completions.create(model="policy", messages=messages, tools=game.tools).choices[0].message
            )
            messages.append(reply.model_dump(exclude_none=True))
            following, reward, is_done = game.step(messages[-1])
            messages += following or []
        service.reward(episodes[0].key, reward)
        rewards.append(reward)
    return rewards


if __name__ == "__main__":
    print(play(sys.argv[1]))
