"""bapo train deploy/configs/demo-agents.toml --agents.rollout examples/agents/agent.py:rollout"""

import json

PARAMETERS = {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}
GET = {"name": "get", "description": "The value of a key.", "parameters": PARAMETERS}


async def rollout(client, prompt):  # client: openai.AsyncOpenAI, with the key of this episode
    messages = prompt.messages  # what the conversation begins with
    for _ in range(10):
        tools = [{"type": "function", "function": GET}]
        reply = await client.chat.completions.create(model="policy", messages=messages, tools=tools)
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return float(f"<answer>{prompt.answer['value']}</answer>" in (message.content or ""))  # the reward, 0 to 1
        for call in message.tool_calls:
            try:
                result = str(prompt.answer["values"][json.loads(call.function.arguments)["key"]])
            except (KeyError, TypeError, ValueError) as error:  # the model wrote the call: let it read what was wrong
                result = f"error: {error!r}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return 0.0
