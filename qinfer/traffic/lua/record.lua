-- Appends copies of requests to a recording while they fit; returns 1 if the recording is full or gone, else 0.
-- KEYS: copies, counts. ARGV: most copies, most bytes, requests that were not copied, copies.
if redis.call('EXISTS', KEYS[2]) == 0 then return 1 end
local most, most_bytes = tonumber(ARGV[1]), tonumber(ARGV[2])
local count = redis.call('XLEN', KEYS[1])
local nbytes = tonumber(redis.call('HGET', KEYS[2], 'bytes') or 0)
local largest = tonumber(redis.call('HGET', KEYS[2], 'largest') or 0)
local full = redis.call('HEXISTS', KEYS[2], 'full')
for i = 4, #ARGV do
  local size = #ARGV[i]
  if full == 1 then break end
  if count < most and nbytes + size <= most_bytes then
    redis.call('XADD', KEYS[1], '*', 'c', ARGV[i])
    count, nbytes, largest = count + 1, nbytes + size, math.max(largest, size)
  else
    full = 1
  end
end
if count >= most then full = 1 end
redis.call('HSET', KEYS[2], 'bytes', nbytes, 'largest', largest)
redis.call('HINCRBY', KEYS[2], 'dropped', ARGV[3])
if full == 1 then redis.call('HSET', KEYS[2], 'full', 1) end
local left = redis.call('PTTL', KEYS[2])
if left > 0 and count > 0 then redis.call('PEXPIRE', KEYS[1], left) end
return full
