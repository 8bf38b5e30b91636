-- Reads an asynchronous request's record, and registers a watcher of its end.
-- KEYS: record. ARGV: prefix, group, id, reply_to ('' = none), most watchers, fields to read.
-- Returns as `read_request`, or nil.
local record = KEYS[1]
local prefix, group, id, reply_to, most = unpack(ARGV)

local state, known = unpack(redis.call('HMGET', record, 'state', 'waiters'))
if not state then return nil end

if state == 'queued' then
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
return read_request(prefix, group, id, {unpack(ARGV, 6)})
