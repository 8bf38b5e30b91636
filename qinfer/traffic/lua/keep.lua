-- Keeps the target of a request under its id and its idempotency key: what was kept before counts, under the id first.
-- KEYS: one for each of them, the id's first. ARGV: target, ms to live. Returns the target.
local target = ARGV[1]
for _, key in ipairs(KEYS) do
  local kept = redis.call('GET', key)
  if kept then
    target = kept
    break
  end
end
for _, key in ipairs(KEYS) do redis.call('SET', key, target, 'NX', 'PX', ARGV[2]) end
return target
