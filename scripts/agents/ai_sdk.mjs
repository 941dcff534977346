// Vercel's AI SDK, which speaks the Responses API to OpenAI.
import { openai } from "@ai-sdk/openai";
import { generateText, stepCountIs, tool } from "ai";
import { z } from "zod";

const inputSchema = z.object({ x: z.number(), y: z.number() });
const tools = {
  add: tool({ description: "Add two numbers.", inputSchema, execute: async ({ x, y }) => x + y }),
  multiply: tool({ description: "Multiply two numbers.", inputSchema, execute: async ({ x, y }) => x * y }),
};
const { text } = await generateText({
  model: openai("gpt-4.1-mini"),
  system: "Use the tools.",
  prompt: process.env.TASK,
  tools,
  stopWhen: stepCountIs(8),
});
console.log(text);
