"""What LiteLLM makes of a server: base URL, model."""

import json
import sys
from typing import Literal

import litellm
import pydantic

url, model = sys.argv[1:]
to = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "none", "num_retries": 0}


class Mood(pydantic.BaseModel):
    mood: Literal["calm", "wild"]


tools = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
messages = [{"role": "user", "content": "What is the weather?"}]
asked = litellm.completion(messages=messages, tools=tools, temperature=0, **to).choices[0]
(call,) = asked.message.tool_calls
chunks = [*litellm.completion(messages=messages, tools=tools, temperature=0, stream=True, **to)]
built = litellm.stream_chunk_builder(chunks, messages=messages)
messages += [asked.message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
concluded = litellm.completion(messages=messages, tools=tools, temperature=0, **to)
mood = litellm.completion(messages=messages[:1], response_format=Mood, seed=1, **to)
text = litellm.text_completion(
    prompt="a", max_tokens=2, **(to | {"model": f"text-completion-openai/{model}"})
)
print(
    json.dumps({
        "call": [call.function.name, json.loads(call.function.arguments)],
        "finish": asked.finish_reason,
        "streamed": json.loads(built.choices[0].message.tool_calls[0].function.arguments),
        "told": concluded.choices[0].message.content,
        "mood": json.loads(mood.choices[0].message.content)["mood"],
        "text": text.choices[0].finish_reason,
    })
)  # fmt: skip
