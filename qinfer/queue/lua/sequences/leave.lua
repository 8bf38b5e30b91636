-- Closes the lanes of a worker that is to give back its sequences, or ends its lease if it owns no sequence.
-- KEYS: the owners, its sequences. ARGV: prefix, is_fragile, worker, whether the lease goes on (1), its lanes. Returns whether
--   it did.
begin(ARGV[1], ARGV[2])
if ARGV[4] == '0' then
  if redis.call('EXISTS', KEYS[2]) == 1 then return 0 end
  redis.call('ZREM', KEYS[1], ARGV[3])
end
for i = 5, #ARGV do close_lane(ARGV[i]) end
return 1
