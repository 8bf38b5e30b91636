-- Removes a step that is answered, with its payload; its response too, unless it is the last one that was committed.
-- KEYS: record, steps, response, payload. ARGV: partition's prefix, whether Redis may lose, name, life, number, entry id.
-- Returns the names of the objects that nothing refers to now.
local function one(KEYS, ARGV)
begin(ARGV[1], '0')
local record, steps, answer, payload = unpack(KEYS)
local name, life, n, entry, gone = ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6], {}

redis.call('XDEL', steps, entry)
if redis.call('EXISTS', payload) == 1 then drop(payload, gone) end
local of = load(name)
local is_last = of and of.life == life and n >= of.committed
if not is_last and redis.call('EXISTS', answer) == 1 then drop(answer, gone) end
local is_empty = redis.call('XLEN', steps) == 0
if is_empty then redis.call('ZREM', prefix .. 'sequence-endings', name) end
if of and of.state == 'open' then
  write(of, {used = now_ms()})
elseif of and is_empty then
  redis.call('UNLINK', steps)
  redis.call('PEXPIRE', record, TOMBSTONE_MS)
  redis.call('PEXPIRE', answer_of(name, of.life, of.committed), TOMBSTONE_MS)
end
return gone
end
