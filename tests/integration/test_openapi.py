"""What ``/openapi.json`` says of the API is what the API does, and ``/docs`` shows all of it."""

import httpx
import jsonschema
import pytest

from stratakv.serve import schemas
from stratakv.serve.docs_page import DocsPages, page_of
from stratakv.serve.openapi import CHAT_BODY, COMPLETION_BODY, openapi_document
from stratakv.serve.tokenizer import Tokenizer
from tests.serving import EchoEngine, make_service, running, train_tokenizer


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    tokenizer = Tokenizer(train_tokenizer(tmp_path_factory.mktemp("tokenizer")))
    engine = EchoEngine()
    with running(make_service(tokenizer, engine), engine) as found:
        yield found


@pytest.fixture(scope="module")
def document(live):
    return httpx.get(f"{live.url}/openapi.json").json()


@pytest.mark.parametrize(
    ("body", "known"), [(COMPLETION_BODY, schemas.COMPLETION), (CHAT_BODY, schemas.CHAT)]
)
def test_each_field_that_a_body_may_have_is_there_and_no_other(body, known):
    assert body["properties"].keys() == known | schemas.HARMLESS | schemas.NEUTRAL.keys()


def test_each_path_is_there_with_its_methods(live, document):
    for path, operations in document["paths"].items():
        asked = httpx.request("PATCH", f"{live.url}{path.replace('{model}', 'm')}")
        assert asked.status_code in (405, 403), path  # storage is closed without a key of its own
        if asked.status_code == 405:
            allowed = {*asked.headers["allow"].replace(" ", "").split(",")} - {"HEAD"}
            assert allowed == {method.upper() for method in operations}, path
    assert {"/v1/completions", "/v1/models/{model}", "/cache/storage", "/docs"} <= {
        *document["paths"]
    }


def test_a_path_without_a_description_is_an_error_at_once():
    with pytest.raises(KeyError):
        DocsPages("1", ["/new"])


def test_the_page_shows_each_path_and_field_and_loads_nothing(live, document):
    answer = httpx.get(f"{live.url}/docs")
    assert answer.text == page_of(document)
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    for path in document["paths"]:
        assert f" {path}</h2>" in answer.text
    for name in COMPLETION_BODY["properties"].keys() | CHAT_BODY["properties"].keys():
        assert f"<code>{name}</code>" in answer.text
    assert "<script" not in answer.text


def test_what_a_client_wrote_is_escaped():
    page = page_of(openapi_document("<b>", ["/docs"]))
    assert "<b>" not in page


BODIES = [
    ("completions", {"prompt": "Hi", "max_tokens": 2, "n": 2, "logprobs": 1}),
    ("completions", {"prompt": [[1, 2], [3]], "max_tokens": 1, "stop": ["x"], "cache": "off"}),
    ("chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}),
    ("chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "top_p": 0}),
    ("completions", {"prompt": "Hi", "max_tokens": 1.5}),
    ("completions", {"prompt": "Hi", "temperature": 3}),
    ("completions", {"prompt": "Hi", "stop": ["a", "b", "c", "d", "e"]}),
    ("completions", {"prompt": []}),
    ("completions", {"prompt": "Hi", "logit_bias": {"x": 1}}),
    ("completions", {"prompt": "Hi", "tools": [{}]}),
    ("completions", {"prompt": "Hi", "surprise": 1}),
    ("completions", {}),
]
BODIES = [(f"/v1/{path}", body) for path, body in BODIES] + [
    ("/tokenize", {"prompt": "Hi"}),
    ("/tokenize", {"prompt": "Hi", "messages": None, "tools": [{}] * 200}),
    ("/tokenize", {"messages": [{"role": "user", "content": "Hi"}], "prompt": 7}),
    ("/tokenize", {"messages": [{"role": "user", "content": "Hi"}], "tools": [{}] * 200}),
    ("/tokenize", {"messages": [], "prompt": "Hi"}),
    ("/tokenize", {"prompt": None}),
    ("/tokenize", {}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_body_is_valid_where_it_is_answered_and_answers_are_as_described(
    live, document, path, body
):
    answer = httpx.post(f"{live.url}{path}", json=body)
    operation = document["paths"][path]["post"]

    def check(schema, value):
        jsonschema.validate(value, {**schema, "components": document["components"]})

    asked = operation["requestBody"]["content"]["application/json"]["schema"]
    described = operation["responses"][str(answer.status_code)]["content"]
    check(described["application/json"]["schema"], answer.json())
    if answer.status_code == 200:
        check(asked, body)
    else:
        with pytest.raises(jsonschema.ValidationError):
            check(asked, body)
