"""Messages <-> token ids by a model's own chat template. Every turn extends the earlier one, token for token."""

from .conversation import Conversation
from .forcing import AnswerForm, answer_form, can_call, relaxed
from .parsers import GRAMMARS, HINTS, Grammar, grammar_named, new_parser
from .renderer import RenderedPrompt, Renderer
from .replay import PastCall, replay
from .reply import ReplyStream
from .sampled import sampled_body, unread_calls
from .template import ChatTemplate
from .tokens import TextDecoder

__all__ = [
    "GRAMMARS",
    "HINTS",
    "AnswerForm",
    "ChatTemplate",
    "Conversation",
    "Grammar",
    "PastCall",
    "RenderedPrompt",
    "Renderer",
    "ReplyStream",
    "TextDecoder",
    "answer_form",
    "can_call",
    "grammar_named",
    "new_parser",
    "relaxed",
    "replay",
    "sampled_body",
    "unread_calls",
]
