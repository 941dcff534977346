// Render an agent's template of @aws/agentcore: node render.cjs HANDLEBARS TEMPLATES TARGET CONTEXT
const fs = require("fs"), path = require("path");
const [handlebars, from, to, context] = process.argv.slice(2);
const H = require(handlebars);
const snake = (name) => String(name).replace(/[-\s]+/g, "_").toLowerCase();
H.registerHelper({
  eq: (a, b) => a === b,
  or: (...all) => all.slice(0, -1).some(Boolean),
  includes: (list, item) => Array.isArray(list) && list.includes(item),
  some: (list, key) => Array.isArray(list) && list.some((one) => one[key]),
  snakeCase: snake,
  safeJson: (value) => new H.SafeString(JSON.stringify(value)),
  pyJsonStr: (value) => new H.SafeString(JSON.stringify(JSON.stringify(value))),
  escapePyStr: (value) => value,
});
const render = (folder, target) => {
  fs.mkdirSync(target, { recursive: true });
  for (const entry of fs.readdirSync(folder, { withFileTypes: true })) {
    const source = path.join(folder, entry.name), made = path.join(target, entry.name);
    if (entry.isDirectory()) render(source, made);
    else fs.writeFileSync(made, H.compile(fs.readFileSync(source, "utf8"), { noEscape: true })(JSON.parse(context)));
  }
};
render(from, to);
