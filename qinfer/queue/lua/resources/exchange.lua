-- Exchanges a worker's units of global resources: takes some back, gives all units of an execution or none, and renews
-- the lease. Wishes are served in order, callees first; units that one waits for are kept from those behind it.
-- KEYS: leases, held, maxima, waiting, news. ARGV: worker, lease (ms), then in JSON maxima, returned units, withdrawn
--   wishes, wish ([worker, units]) or '', is_callee.
-- Returns {has_got, units, names that others wait for, ms to the next end of another's lease or -1}.
local leases, held, maxima, waiting, news = unpack(KEYS)
local worker, wanted, is_callee = ARGV[1], ARGV[6], ARGV[7] == '1'
local now, has_freed, has_got, is_new = now_ms(), false, 0, false
local CALLEES_FIRST, NEWS = 4e15, 64

redis.call('ZREM', leases, '') -- for full memory

local function read(key, field)
  return cjson.decode(redis.call('HGET', key, field) or '{}')
end

local function write(key, field, units)
  if next(units) then redis.call('HSET', key, field, cjson.encode(units)) else redis.call('HDEL', key, field) end
end

local function each(key, visit)
  local found = redis.call('HGETALL', key)
  for i = 1, #found, 2 do
    for name, units in pairs(cjson.decode(found[i + 1])) do visit(name, units) end
  end
end

local function line()
  return redis.call('ZRANGE', waiting, 0, -1)
end

local function forget(dead)
  redis.call('ZREM', leases, dead)
  redis.call('HDEL', held, dead)
  redis.call('HDEL', maxima, dead)
  for _, member in ipairs(line()) do
    if cjson.decode(member)[1] == dead then redis.call('ZREM', waiting, member) end
  end
  has_freed = true
end

local function take(mine)
  local free = {}
  each(maxima, function(name, units) free[name] = math.max(free[name] or 0, units) end)
  each(held, function(name, units) free[name] = (free[name] or 0) - units end)
  for _, member in ipairs(line()) do
    local fits, needs = true, cjson.decode(member)[2]
    for name, units in pairs(needs) do fits = fits and (free[name] or 0) >= units end
    if member == wanted then
      if not fits then return false end
      for name, units in pairs(needs) do mine[name] = (mine[name] or 0) + units end
      redis.call('ZREM', waiting, member)
      return true
    end
    for name, units in pairs(needs) do free[name] = math.max((free[name] or 0) - units, 0) end
  end
  return false
end

for _, name in ipairs(redis.call('ZRANGEBYSCORE', leases, '-inf', now)) do
  if name ~= worker then forget(name) end
end
local is_known = redis.call('ZADD', leases, string.format('%.0f', now + ARGV[2]), worker) == 0
local mine = is_known and read(held, worker) or {}
write(maxima, worker, cjson.decode(ARGV[3]))
for name, units in pairs(cjson.decode(ARGV[4])) do
  local left = (mine[name] or 0) - units
  mine[name] = left > 0 and left or nil
  has_freed = true
end
for _, member in ipairs(cjson.decode(ARGV[5])) do
  if redis.call('ZREM', waiting, member) == 1 then has_freed = true end
end
write(held, worker, mine)
if wanted ~= '' then
  local time = redis.call('TIME')
  local order = time[1] * 1000000 + time[2] - (is_callee and CALLEES_FIRST or 0)
  local before = tonumber(redis.call('ZSCORE', waiting, wanted) or '')
  is_new = before == nil
  if is_new or (is_callee and before > 0) then redis.call('ZADD', waiting, string.format('%.0f', order), wanted) end
  if take(mine) then
    has_got = 1
    write(held, worker, mine)
  elseif is_new then
    redis.call('XADD', news, 'MAXLEN', '~', NEWS, '*', 'wanted', wanted)
  end
end
if has_freed and redis.call('EXISTS', waiting) == 1 then
  redis.call('XADD', news, 'MAXLEN', '~', NEWS, '*', 'freed', worker)
end

local others, next_ms = {}, -1
for _, member in ipairs(line()) do
  local of = cjson.decode(member)
  if of[1] ~= worker then
    for name in pairs(of[2]) do others[name] = 1 end
  end
end
local names = {}
for name in pairs(others) do names[#names + 1] = name end
for _, name in ipairs(redis.call('ZRANGE', leases, 0, 1)) do
  if name ~= worker and next_ms < 0 then next_ms = redis.call('ZSCORE', leases, name) - now end
end
for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, string.format('%.0f', 4 * ARGV[2])) end
return {has_got, cjson.encode(mine), names, string.format('%.0f', next_ms)}
