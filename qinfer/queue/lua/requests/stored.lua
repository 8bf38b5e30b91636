-- The bytes of results that tenants have stored in a partition; needs now_ms.lua.
--   <prefix>stored:<tenant>        hash: request → bytes, and '' → their sum
--   <prefix>stored-until:<tenant>  sorted set of requests by the expiry of their results
local SPARED = 16 * 1024 * 1024 -- bytes that each tenant may store
local FILES = 'file-' -- in the prefix of results in files

-- 0 bytes = removed.
local function change_stored(prefix, tenant, id, bytes, until_ms)
  local sizes, times = prefix .. 'stored:' .. tenant, prefix .. 'stored-until:' .. tenant
  local before = tonumber(redis.call('HGET', sizes, id) or '0')
  if bytes == 0 then
    redis.call('HDEL', sizes, id)
    redis.call('ZREM', times, id)
  else
    redis.call('HSET', sizes, id, bytes)
    redis.call('ZADD', times, until_ms, id)
  end
  if bytes ~= before then redis.call('HINCRBY', sizes, '', bytes - before) end
  local last = redis.call('ZREVRANGE', times, 0, 0, 'WITHSCORES')
  local left = math.max(tonumber(last[2] or '0') - now_ms(), 0)
  for _, key in ipairs({sizes, times}) do redis.call('PEXPIRE', key, left) end
end

local function expired(prefix, tenant)
  return redis.call('ZRANGEBYSCORE', prefix .. 'stored-until:' .. tenant, '-inf', now_ms(), 'LIMIT', 0, 100)
end

local function forget_expired(prefix, tenant)
  for _, id in ipairs(expired(prefix, tenant)) do change_stored(prefix, tenant, id, 0) end
end

local function note_stored(prefix, tenant, id, bytes, until_ms)
  change_stored(prefix, tenant, id, bytes, until_ms)
  forget_expired(prefix, tenant)
end

local function note_removed(prefix, tenant, id)
  for _, kind in ipairs({'', FILES}) do note_stored(prefix .. kind, tenant, id, 0) end
end

-- Tells whether `more` bytes exceed the tenant's share, as many as are free (dynamic thresholds), by default in Redis.
-- It writes nothing: after a write full memory stops no script.
local function is_over(prefix, tenant, more, free)
  local sizes, ids = prefix .. 'stored:' .. tenant, expired(prefix, tenant)
  local own = tonumber(redis.call('HGET', sizes, '') or '0') + more
  if ids[1] then
    for _, bytes in ipairs(redis.call('HMGET', sizes, unpack(ids))) do own = own - tonumber(bytes or '0') end
  end
  if own <= SPARED then return false end
  if free then return own > free end
  local memory = redis.call('INFO', 'memory')
  local most, used = string.match(memory, '\nmaxmemory:(%d+)'), string.match(memory, '\nused_memory:(%d+)')
  return tonumber(most) > 0 and own > tonumber(most) - tonumber(used)
end
