// A kernel for JavaScript: node's own REPL, whose input and output are lines of JSON on the descriptors 3 and 4.
// What awaits something can be interrupted. A loop that never awaits cannot: its kernel is ended.
'use strict'
const fs = require('node:fs')
const readline = require('node:readline')
const repl = require('node:repl')
const { PassThrough } = require('node:stream')
const util = require('node:util')

const typed = process.argv[2] === 'typescript'
const stripTypes = typed ? require('node:module').stripTypeScriptTypes : (code) => code
const tell = (event) => fs.writeSync(4, JSON.stringify(event) + '\n')

for (const name of ['stdout', 'stderr']) {
  process[name].write = (chunk, encoding, callback) => {
    tell({ type: name, text: typeof chunk === 'string' ? chunk : Buffer.from(chunk).toString() })
    const done = typeof encoding === 'function' ? encoding : callback
    if (done) process.nextTick(done)
    return true
  }
}

const failed = (error) => tell(
  error instanceof Error
    ? { type: 'error', name: error.name, value: error.message, traceback: error.stack ?? '' }
    : { type: 'error', name: 'Error', value: util.inspect(error), traceback: '' })

// What the code throws comes to the REPL's domain, or to nobody: it ends the evaluation under way.
let settle = null
function thrown (error) {
  if (settle) settle(error)
  else process.stderr.write(util.inspect(error) + '\n')
}
process.on('uncaughtException', thrown)

const server = repl.start({
  prompt: '', input: new PassThrough(), output: new PassThrough(), terminal: false, useGlobal: true,
  ignoreUndefined: true
})
server._domain?.removeAllListeners('error').on('error', thrown)

// A REPL knows no static import: `import a, {b as c} from 'd'` becomes an awaited one.
function asAwaited (code) {
  return code.replace(
    /^([ \t]*)import\s+(?:([\w$*\s{},]+?)\s+from\s+)?(['"][^'"\n]+['"])[ \t]*;?/gm,
    (_, indent, names, source) => {
      if (!names) return `${indent}await import(${source});`
      const parts = []
      const whole = names.match(/\*\s+as\s+([\w$]+)/)
      if (whole) return `${indent}const ${whole[1]} = await import(${source});`
      const main = names.match(/^([\w$]+)\s*(?:,|$)/)
      if (main) parts.push(`default: ${main[1]}`)
      const braces = names.match(/\{([^}]*)\}/)
      if (braces) parts.push(...braces[1].split(',').map((n) => n.trim().replace(/\s+as\s+/, ': ')).filter(Boolean))
      return `${indent}const { ${parts.join(', ')} } = await import(${source});`
    })
}

function evaluate (code) {
  return new Promise((resolve) => {
    settle = (error, value) => {
      settle = null
      if (error) failed(error instanceof repl.Recoverable ? error.err : error)
      else if (value !== undefined) {
        const text = typeof value === 'string' ? value : util.inspect(value)
        tell({ type: 'result', text, extra: {}, is_main_result: true })
      }
      resolve()
    }
    try {
      const source = asAwaited(stripTypes(code))
      server.eval(source + '\n', server.context, 'cell.js', (error, value) => settle?.(error, value))
    } catch (error) {
      settle?.(error)
    }
  })
}

let counted = 0
async function answer (request) {
  if (request.interrupt) {
    settle?.(Object.assign(new Error('the execution was interrupted'), { name: 'Interrupted', stack: '' }))
    return
  }
  for (const [name, value] of Object.entries(request.variables ?? {})) {
    if (value === null) delete process.env[name]
    else process.env[name] = value
  }
  if (request.code !== undefined) {
    tell({ type: 'number_of_executions', execution_count: ++counted })
    await evaluate(request.code)
  }
  tell({ type: 'done' })
}

readline.createInterface({ input: fs.createReadStream(null, { fd: 3 }) })
  .on('line', (line) => answer(JSON.parse(line)))
  .on('close', () => process.exit())
tell({ type: 'done' })
