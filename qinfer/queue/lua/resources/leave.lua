-- Ends a worker's lease on global resources. KEYS: as for exchange. ARGV: worker.
local leases, held, maxima, waiting, news = unpack(KEYS)
for _, member in ipairs(redis.call('ZRANGE', waiting, 0, -1)) do
  if cjson.decode(member)[1] == ARGV[1] then redis.call('ZREM', waiting, member) end
end
redis.call('HDEL', held, ARGV[1])
redis.call('HDEL', maxima, ARGV[1])
redis.call('ZREM', leases, ARGV[1])
if redis.call('EXISTS', waiting) == 1 then redis.call('XADD', news, 'MAXLEN', '~', 64, '*', 'freed', ARGV[1]) end
