"""Messages <-> token ids by a model's own chat template, so that every turn extends the one before it token for
token.
"""

from .algebra import TemplateFacts, probe
from .conversation import Conversation
from .doctor import NO_TOOLS, Check, DoctorReport, examine
from .forcing import call_format
from .parsers import GRAMMARS, Grammar, grammar_named, grammar_of, new_parser
from .renderer import RenderedPrompt, Renderer
from .replay import PastCall, replay
from .reply import ReplyStream
from .template import ChatTemplate
from .tokens import TextDecoder, Tokenizer

__all__ = [
    "GRAMMARS",
    "NO_TOOLS",
    "ChatTemplate",
    "Check",
    "Conversation",
    "DoctorReport",
    "Grammar",
    "PastCall",
    "RenderedPrompt",
    "Renderer",
    "ReplyStream",
    "TemplateFacts",
    "TextDecoder",
    "Tokenizer",
    "call_format",
    "examine",
    "grammar_named",
    "grammar_of",
    "new_parser",
    "probe",
    "replay",
]
