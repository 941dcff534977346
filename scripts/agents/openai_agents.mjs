// OpenAI Agents SDK for JavaScript, which speaks the Responses API.
import { Agent, run, tool } from "@openai/agents";
import { z } from "zod";

const parameters = z.object({ x: z.number(), y: z.number() });
const add = tool({ name: "add", description: "Add two numbers.", parameters, execute: async ({ x, y }) => x + y });
const multiply = tool({ name: "multiply", description: "Multiply.", parameters, execute: async ({ x, y }) => x * y });
const agent = new Agent({ name: "calculator", instructions: "Use the tools.", model: "gpt-4.1-mini", tools: [add, multiply] });
const result = await run(agent, process.env.TASK);
console.log(result.finalOutput);
