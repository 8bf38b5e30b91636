-- Reads an asynchronous request's record, and registers a watcher of its end.
-- KEYS: record, result, responses. ARGV: prefix, group, released, suspects, reply_to ('' = none), most watchers, fields
--   to read.
-- Returns {values, has_result, is_held, deliveries, stored responses}, or nil.
local record, result, responses = unpack(KEYS)
local prefix, group, released, suspects, reply_to, most = unpack(ARGV)

local state, version, name, entry, known = unpack(redis.call('HMGET', record, 'state', 'version', 'lane', 'entry', 'waiters'))
if not state then return nil end

local is_held, deliveries = 0, 0
if state == 'queued' then
  local lane = prefix .. version .. ':' .. name
  local pending = redis.pcall('XPENDING', lane, group, entry, entry, 1)
  if pending[1] then
    local owner = pending[1][2]
    is_held, deliveries = owner ~= released and owner ~= suspects and 1 or 0, pending[1][4]
  end

  local waiters, count = {}, tonumber(most)
  for waiter in string.gmatch(known or '', '[^\n]+') do
    if waiter ~= reply_to then waiters[#waiters + 1] = waiter end
  end
  if reply_to ~= '' then
    waiters[#waiters + 1] = reply_to
    local line = table.concat(waiters, '\n', math.max(1, #waiters - count + 1))
    redis.pcall('HSET', record, 'waiters', line) -- with full memory there is no hint
  end
end
return {redis.call('HMGET', record, unpack(ARGV, 7)), redis.call('EXISTS', result), is_held, deliveries,
  redis.call('LLEN', responses)}
