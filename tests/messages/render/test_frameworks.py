"""Real agent frameworks over HTTP: whatever they do to the history between turns, turns extend each other."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from agentcore_rl_toolkit.messages.dialects import Reply, RequestError, Usage, deltas_of, new_id
from agentcore_rl_toolkit.messages.errors import error_body
from agentcore_rl_toolkit.messages.render import RenderedPrompt, Renderer
from agentcore_rl_toolkit.trajectory import Turn, build_trajectory

from ..dialect_paths import dialect_of


class TokenServer:
    """Renders, "samples" the next scripted completion, parses, answers in the caller's dialect."""

    def __init__(self, renderer: Renderer, script: list[str]) -> None:
        self.renderer = renderer
        self.script = script
        self.conversation = renderer.conversation(now=0.0)
        self.prompts: list[RenderedPrompt] = []
        self.turns: list[Turn] = []
        self.url = ""

    def answer(self, path: str, body: bytes) -> tuple[int, str, bytes]:
        dialect = dialect_of(path.partition("?")[0])
        assert dialect is not None, path
        try:
            request = dialect.parse_request(body)
        except RequestError as error:
            return error.status or 500, "application/json", error_body(dialect.name, error)
        renderer, number = self.renderer, len(self.turns)
        prompt = renderer.render(self.conversation, request.messages, request.tools, request.template_kwargs)
        completion = renderer.encode(self.script[number])
        parsed = renderer.parse(completion, tools=request.tools, prompt=prompt)
        choice = parsed.to_choice(engine_reason="stop")
        renderer.commit(self.conversation, prompt, completion, choice.to_message(), turn_id=f"t{number}")
        self.prompts.append(prompt)
        self.turns.append(
            Turn(
                turn_id=f"t{number}",
                index=number,
                prompt_ids=prompt.token_ids,
                completion_ids=completion,
                logprobs=[-0.5] * len(completion),
                finish_reason="stop",
                parse_status=parsed.status,
                branch_reason=prompt.branch_reason,
            )
        )
        usage = Usage(prompt_tokens=prompt.length, completion_tokens=len(completion))
        reply = Reply(id=new_id("chatcmpl-"), model="small", choices=[choice], usage=usage)
        if not request.stream:
            return 200, "application/json", dialect.encode_reply(reply, request)
        encoder = dialect.encoder(request, reply_id=reply.id)
        deltas = b"".join(encoder.feed(delta) for delta in deltas_of(reply))
        return 200, "text/event-stream", encoder.start() + deltas + encoder.finish()


@pytest.fixture
def serve() -> Iterator[Any]:
    stops = []

    def start(renderer: Renderer, script: list[str]) -> TokenServer:
        made = TokenServer(renderer, script)

        class Handler(http.server.BaseHTTPRequestHandler):
            # HTTP/1.0: a framework that moves a client from one event loop to the next would find its connections dead.
            def do_POST(self) -> None:
                status, kind, body = made.answer(self.path, self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: Any) -> None:
                """Quiet."""

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        made.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        stops.append((server, thread))
        return made

    yield start
    for server, thread in stops:
        server.shutdown()
        thread.join(10)
        server.server_close()


QWEN3 = [
    "<think>\nI should add.\n</think>\n\nLet me see.\n"
    '<tool_call>\n{"name": "calculator", "arguments": {"expression":   "2 + 3"}}\n</tool_call><|im_end|>',
    '<tool_call>\n{"name": "calculator", "arguments": {"expression": "5 * 2"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "calculator", "arguments": {"expression": "5 - 2"}}\n</tool_call><|im_end|>',
    "\n\nThe answer is 10.  \n<|im_end|>",
    "You are welcome.<|im_end|>",
]
GLM = [
    "\n<think>I should add.</think>\nLet me see.\n<tool_call>calculator\n<arg_key>expression</arg_key>\n"
    "<arg_value>2 + 3</arg_value>\n</tool_call><|observation|>",
    "\n<think></think>\n<tool_call>calculator\n<arg_key>expression</arg_key>\n<arg_value>5 * 2</arg_value>\n</tool_call>"
    "\n<tool_call>calculator\n<arg_key>expression</arg_key>\n<arg_value>5 - 2</arg_value>\n</tool_call><|observation|>",
    "\n<think></think>\nThe answer is 10.<|user|>",
    "\nYou are welcome.<|user|>",
]


INVOKE = (
    '<｜DSML｜invoke name="calculator">\n<｜DSML｜parameter name="expression" string="true">{}</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n"
)
BLOCK = "<｜DSML｜function_calls>\n{}</｜DSML｜function_calls><｜end▁of▁sentence｜>"
DSML = [
    "Let me see.\n\n" + BLOCK.format(INVOKE.format("2 + 3")),
    BLOCK.format(INVOKE.format("5 * 2") + INVOKE.format("5 - 2")),
    "The answer is 10.<｜end▁of▁sentence｜>",
    "You are welcome.<｜end▁of▁sentence｜>",
]


@pytest.mark.parametrize(("family_name", "script"), [("qwen3", QWEN3), ("glm", GLM), ("deepseek_dsml", DSML)])
@pytest.mark.parametrize("provider_name", ["openai", "anthropic"])
def test_strands_agents_keep_every_token(family_name, script, provider_name, renderer_for, serve) -> None:
    strands = pytest.importorskip("strands")
    server = serve(renderer_for(family_name), script)
    if provider_name == "openai":
        from strands.models.openai import OpenAIModel

        model = OpenAIModel(client_args={"base_url": server.url + "/v1", "api_key": "k"}, model_id="small")
    else:
        from strands.models.anthropic import AnthropicModel

        client_args = {"base_url": server.url, "api_key": "k"}
        model = AnthropicModel(client_args=client_args, model_id="small", max_tokens=64)
    asked: list[str] = []

    @strands.tool
    def calculator(expression: str) -> str:
        """Evaluate one arithmetic expression.

        Args:
            expression: Like 2 + 3
        """
        asked.append(expression)
        return str({"2 + 3": 5, "5 * 2": 10, "5 - 2": 3}[expression])

    agent = strands.Agent(model=model, tools=[calculator], system_prompt="Use the calculator.", callback_handler=None)
    first = agent("What is (2 + 3) * 2?")
    assert "The answer is 10." in str(first)
    assert "welcome" in str(agent("Thanks."))
    assert sorted(asked) == ["2 + 3", "5 * 2", "5 - 2"]
    assert [prompt.extended for prompt in server.prompts] == [False, True, True, True]
    trajectory = build_trajectory("s", server.turns)
    (sequence,) = trajectory.sequences
    assert trajectory.report.trained_token_share == 1.0
    assert trajectory.report.branches == 0
    assert sequence.turn_ids == ["t0", "t1", "t2", "t3"]


def test_the_openai_client_with_responses_keeps_every_token(renderer_for, serve) -> None:
    openai = pytest.importorskip("openai")
    server = serve(renderer_for("qwen3"), QWEN3)
    tool = {"type": "function", "name": "calculator", "parameters": {"type": "object", "properties": {}}}
    with openai.OpenAI(base_url=server.url + "/v1", api_key="k", max_retries=0) as client:
        items: list[Any] = [{"role": "user", "content": "What is (2 + 3) * 2?"}]
        for _ in range(3):
            answer = client.responses.create(model="small", input=items, tools=[tool], instructions="Calculate.")
            items += [item.model_dump(exclude_none=True) for item in answer.output]
            for item in answer.output:
                if item.type == "function_call":
                    assert "expression" in json.loads(item.arguments)
                    items.append({"type": "function_call_output", "call_id": item.call_id, "output": "5"})
    assert [prompt.extended for prompt in server.prompts] == [False, True, True]
    assert build_trajectory("s", server.turns).report.branches == 0
