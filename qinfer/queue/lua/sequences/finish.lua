-- Removes an answered step with its payload, and its response unless it is the last committed one.
-- KEYS: record, the stream of the entry. ARGV: prefix, is_fragile, name, life, number (0 = not executed), entry,
--   payload's key ('' = none). Returns unreferenced objects.
local function one(KEYS, ARGV)
begin(ARGV[1], '0')
local record = KEYS[1]
local name, life, n, entry, payload, gone = ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6], ARGV[7], {}
local steps = steps_of(name)

-- The next owner finds the entry of a closed lane, and that it is done.
if redis.call('XDEL', KEYS[2], entry) == 1 then
  redis.call('HDEL', record, 'done:' .. (KEYS[2] == steps and 'steps/' or '') .. entry)
end
if payload ~= '' then drop(payload, gone) end
if redis.call('HGET', record, 'at') == life .. ' ' .. n then
  return gone -- the last committed step of an open life
end
local of = load(name)
local is_last = of and of.life == life and n >= of.committed
if not is_last then drop_answer(name, life, n, gone) end
if (of and of.state == 'open') or redis.call('XLEN', steps) > 0 then return gone end
redis.call('ZREM', prefix .. 'sequence-endings', name)
if of then forget(of) end
return gone
end
