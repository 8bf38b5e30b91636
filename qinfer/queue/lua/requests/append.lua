-- Appends stored responses for the consumer that holds the request's entry.
-- KEYS: record, responses. ARGV: prefix, group, consumer, delivery, lane, entry, resumes (1 = continues an earlier
--   delivery), most (bytes), index, responses.
-- Returns {what, count, watchers by line}: stored | ended (or another's) | broken | full | over (the tenant has stored
--   too much).
local record, responses = KEYS[1], KEYS[2]
local prefix, group, consumer, delivery, lane, entry, resumes, most, index = unpack(ARGV, 1, 9)
local FIRST = 10

local known = redis.call('HMGET', record, 'state', 'version', 'lane', 'entry', 'waiters', 'stored_by', 'stored_bytes',
  'share')
local pending = held(lane, group, consumer, entry)
local is_holder = pending and pending[4] == tonumber(delivery)
local is_its = known[1] == 'queued' and lane == prefix .. known[2] .. ':' .. known[3] and entry == known[4]
if not (is_holder and is_its) then return {'ended', 0, ''} end

-- An execution differs from earlier ones unless its model says otherwise. Redis lost missing responses.
local count, size = redis.call('LLEN', responses), tonumber(known[7] or '0')
local is_other = count > 0 and known[6] ~= delivery and resumes == '0'
if is_other or tonumber(index) > count then return {'broken', count, ''} end

local new = FIRST + count - tonumber(index)
for i = new, #ARGV do size = size + #ARGV[i] end
if size > tonumber(most) then return {'full', count, ''} end
local share, before = known[8], tonumber(known[7] or '0')
if share and size > before and is_over(prefix, share, size - before) then return {'over', count, ''} end

-- With full memory the first write raises, and nothing is stored.
for i = new, #ARGV do redis.call('RPUSH', responses, ARGV[i]) end
redis.call('HSET', record, 'stored_by', delivery, 'stored_bytes', size)
if share then note_stored(prefix, share, string.sub(record, #prefix + #'request:' + 1), size, now_ms() + redis.call('PTTL', record)) end
if count == 0 then redis.call('PEXPIRE', responses, redis.call('PTTL', record)) end
return {'stored', math.max(count, tonumber(index) + #ARGV - FIRST + 1), new <= #ARGV and known[5] or ''}
