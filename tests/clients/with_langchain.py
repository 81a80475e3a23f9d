"""What LangChain makes of a server: base URL, model."""

import json
import sys
from typing import Literal

import pydantic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

url, model = sys.argv[1:]
chat = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=model, max_retries=0, temperature=0)


@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


class Mood(pydantic.BaseModel):
    """How somebody feels."""

    mood: Literal["calm", "wild"]


def bound(**more):
    return chat.bind_tools([get_weather], **more)


messages = [HumanMessage("What is the weather?")]
answer = bound().invoke(messages)
(call,) = answer.tool_calls
messages += [answer, ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])]
gathered = None
for chunk in bound().stream(messages[:1]):
    gathered = chunk if gathered is None else gathered + chunk
drawn = chat.model_copy(update={"temperature": 1.0, "seed": 1, "max_tokens": 200})
moods = {
    method: drawn.with_structured_output(Mood, method=method).invoke("How are you?").mood
    for method in ("json_schema", "function_calling")
}
print(
    json.dumps({
        "call": [call["name"], call["args"]],
        "streamed": gathered.tool_calls[0]["args"],
        "told": bound().invoke(messages).content,
        "moods": moods,
        "plain": chat.invoke("hi").content,
        "tokens": answer.usage_metadata["total_tokens"],
        "none": bound(tool_choice="none").invoke(messages[:1]).content,
    })
)  # fmt: skip
