"""A LangGraph agent with ChatOpenAI, run in an environment of its own: python with_langgraph.py CASES."""

import json
import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

added: list[list[int]] = []


@tool
def add(x: int, y: int) -> int:
    """Add two numbers."""
    added.append([x, y])
    return x + y


for url, key, dialect, mode in json.loads(sys.argv[1]):
    added.clear()
    llm = ChatOpenAI(
        base_url=url,
        api_key=key,
        model="m",
        max_tokens=64,
        max_retries=0,
        streaming=mode == "stream",
        use_responses_api=dialect == "responses",
    ).bind_tools([add])

    def ask(state: MessagesState, llm=llm) -> dict[str, list[object]]:
        return {"messages": [llm.invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("ask", ask)
    graph.add_node("tools", ToolNode([add]))
    graph.add_edge(START, "ask")
    graph.add_conditional_edges("ask", tools_condition)
    graph.add_edge("tools", "ask")
    agent = graph.compile()

    question = {"messages": [("system", "be brief"), ("user", "what is 2 + 3, and 4 + 5")]}
    pieces = 0
    if mode == "stream":
        final = ""
        for chunk, about in agent.stream(question, stream_mode="messages"):
            pieces += 1
            if about["langgraph_node"] == "ask" and chunk.text:
                final += chunk.text
    else:
        final = agent.invoke(question)["messages"][-1].text
    print(json.dumps({"text": final.strip(), "added": sorted(added), "pieces": pieces}))
