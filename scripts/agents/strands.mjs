// Strands for TypeScript, whose default model is Amazon Bedrock's. AWS's client for it speaks HTTP/2 unless it is given this handler.
import { NodeHttpHandler } from "@smithy/node-http-handler";
import { Agent, BedrockModel, tool } from "@strands-agents/sdk";
import { z } from "zod";

const inputSchema = z.object({ x: z.number(), y: z.number() });
const add = tool({ name: "add", description: "Add two numbers.", inputSchema, callback: ({ x, y }) => x + y });
const multiply = tool({ name: "multiply", description: "Multiply two numbers.", inputSchema, callback: ({ x, y }) => x * y });
const model = new BedrockModel({ clientConfig: { requestHandler: new NodeHttpHandler() } });
const agent = new Agent({ model, tools: [add, multiply], systemPrompt: "Use the tools.", printer: false });
const result = await agent.invoke(process.env.TASK);
console.log(result.lastMessage.content.map((block) => block.text ?? "").join(""));
