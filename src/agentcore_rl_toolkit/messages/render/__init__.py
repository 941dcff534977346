"""Messages <-> token ids by a model's own chat template. Every turn extends the earlier one, token for token.

Names load on first use: a gateway that passes chats on needs no template engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..._lazy import lazy

if TYPE_CHECKING:
    from .conversation import Conversation as Conversation
    from .conversation import RenderedPrompt as RenderedPrompt
    from .forcing import AnswerForm as AnswerForm
    from .forcing import answer_form as answer_form
    from .forcing import relaxed as relaxed
    from .parsers import GRAMMARS as GRAMMARS
    from .parsers import HINTS as HINTS
    from .parsers import Grammar as Grammar
    from .parsers import grammar_named as grammar_named
    from .renderer import Renderer as Renderer
    from .reply import ReplyStream as ReplyStream
    from .sampled import sampled_body as sampled_body
    from .sampled import unread_calls as unread_calls
    from .template import ChatTemplate as ChatTemplate
    from .tokens import TextDecoder as TextDecoder
else:
    __all__, __getattr__, __dir__ = lazy(__name__)
