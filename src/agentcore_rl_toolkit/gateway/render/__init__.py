"""Messages <-> token ids by a model's own chat template, so that every turn extends the one before it token for
token.
"""

from .algebra import TemplateFacts, probe
from .conversation import Conversation
from .doctor import Check, DoctorReport, examine
from .parsers import GRAMMARS, Grammar, grammar_named, grammar_of, new_parser
from .renderer import RenderedPrompt, Renderer
from .reply import ParsedReply, ReplyStream
from .template import ChatTemplate
from .tokens import TextDecoder, Tokenizer

__all__ = [
    "GRAMMARS",
    "ChatTemplate",
    "Check",
    "Conversation",
    "DoctorReport",
    "Grammar",
    "ParsedReply",
    "RenderedPrompt",
    "Renderer",
    "ReplyStream",
    "TemplateFacts",
    "TextDecoder",
    "Tokenizer",
    "examine",
    "grammar_named",
    "grammar_of",
    "new_parser",
    "probe",
]
