"""Episodes: agents that call an OpenAI-compatible address, recorded turn by turn, as responses of a group.

    agent --open--> manager.py (claims, leases) --journal--> buffer
    agent --/v1/chat/completions--> address.py, vllm_serving.py --> history.py --> engine_calls.py --> a worker's engine
                                     the reply follows the journal's acknowledgement
    agent --reward--> manager.py: the G-th one makes the group --> delivery.py

episode.py: the pure part, and what the journal holds. group.py: episodes to the columns of a group.
"""
