"""What the openai client's helpers make of a server: base URL, model."""

import json
import sys
from typing import Literal

import openai
import pydantic

url, model = sys.argv[1:]
client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


class get_weather(pydantic.BaseModel):  # noqa: N801 - the function's name
    city: str


class Mood(pydantic.BaseModel):
    mood: Literal["calm", "wild"]


tool = openai.pydantic_function_tool(get_weather)
messages = [{"role": "user", "content": "What is the weather?"}]
asked = client.chat.completions.parse(model=model, messages=messages, tools=[tool], temperature=0)
(call,) = asked.choices[0].message.tool_calls
with client.chat.completions.stream(
    model=model, messages=messages, tools=[tool], temperature=0
) as events:
    (streamed,) = events.get_final_completion().choices[0].message.tool_calls
messages.append(asked.choices[0].message)
messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
concluded = client.chat.completions.create(
    model=model, messages=messages, tools=[tool], temperature=0
)
parsed = client.chat.completions.parse(
    model=model, messages=messages[:1], response_format=Mood, seed=1
)
with client.chat.completions.stream(
    model=model, messages=messages[:1], response_format=Mood, seed=1
) as events:
    same = events.get_final_completion().choices[0].message.parsed
print(
    json.dumps({
        "call": [call.function.name, call.function.parsed_arguments.city],
        "finish": asked.choices[0].finish_reason,
        "streamed": streamed.function.parsed_arguments.city,
        "told": concluded.choices[0].message.content,
        "mood": parsed.choices[0].message.parsed.mood,
        "same": same.mood,
        "models": [one.id for one in client.models.list()],
        "page": [one.text for one in client.completions.create(
            model=model, prompt=["a", "b"], max_tokens=0, echo=True).choices],
    })
)  # fmt: skip
