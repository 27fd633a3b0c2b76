"""LangChain's standard tests of a chat model, with its OpenAI client."""

from __future__ import annotations

import os

from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests


class TestChatOpenAI(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[ChatOpenAI]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict:
        return {
            "base_url": f"{os.environ['PACE_URL']}/v1",
            "api_key": "none",
            "model": "tiny",
            "max_tokens": 500,
            "temperature": 0,
            "stream_usage": True,
        }

    @property
    def supports_model_override(self) -> bool:
        return False  # there is one model

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True
