// Mastra, with its own model router.
import { openai } from "@ai-sdk/openai";
import { Agent } from "@mastra/core/agent";
import { createTool } from "@mastra/core/tools";
import { z } from "zod";

const inputSchema = z.object({ x: z.number(), y: z.number() });
const add = createTool({
  id: "add",
  description: "Add two numbers.",
  inputSchema,
  execute: async ({ context, x, y }) => (context?.x ?? x) + (context?.y ?? y),
});
const multiply = createTool({
  id: "multiply",
  description: "Multiply two numbers.",
  inputSchema,
  execute: async ({ context, x, y }) => (context?.x ?? x) * (context?.y ?? y),
});
const agent = new Agent({
  id: "calculator",
  name: "calculator",
  instructions: "Use the tools.",
  model: openai("gpt-4.1-mini"),
  tools: { add, multiply },
});
const result = await agent.generate(process.env.TASK, { maxSteps: 8 });
console.log(result.text);
