-- What the scripts of sequences share: the record of a sequence, and the steps of its life. A *life* begins with START; the
-- lives of one sequence (same tenant and correlation id) follow one another, and their steps are in one stream, in order.
-- The record is a hash: state (open | ended); of the life that executes now `life`, its version, generation, kind, idle (ms),
-- owner, token (which rises with each owner), taken, committed, entry (of the last committed step), deaths (of workers that
-- had its next step), used (ms), era; of the last life `tail`, accepted, hash (of its START). `last:<life>` is the number of
-- a life's last step, once that is known; `next:<life>` the version, generation, kind and idle time of a life that waits;
-- `fail:<life>` why it is to end when it begins. code, text, failed and failed_life say how a life ended by an error.
local TOMBSTONE_MS = 300000 -- so long a sequence that has ended is known
local LOOK_MS = 60000       -- so often the janitor looks at one, and so long one that nobody owns may be idle
local GRACE_MS = 10000      -- so long who answers steps of a life that has ended has time for it
local DAY_MS = 86400000
local NUMBERS = {life = true, committed = true, token = true, taken = true, deaths = true, idle = true, used = true,
  tail = true, accepted = true, failed = true, failed_life = true}
local FIELDS = {'state', 'life', 'version', 'generation', 'kind', 'idle', 'owner', 'token', 'ticket', 'taken', 'committed',
  'entry', 'deaths', 'used', 'era', 'tail', 'accepted', 'hash', 'code', 'text', 'failed', 'failed_life'}
local prefix, era
local over, fail

local function record_of(name) return prefix .. 'sequence:' .. name end
local function steps_of(name) return prefix .. '0:steps:' .. name end
local function state_of(name) return prefix .. 'sequence-state:' .. name end
local function answer_of(name, life, n) return prefix .. string.format('sequence-answer:%d.%d:%s', life, n, name) end
local function lane_of(version, worker) return prefix .. version .. ':seq@' .. worker end
local function count(what) redis.call('HINCRBY', prefix .. 'sequence-counts', what, 1) end

-- Says which partition it is, and whether Redis may lose what it has confirmed. Then a sequence whose record was written
-- before Redis was restarted or failed over (`master_replid` changes) is not continued.
local function begin(partition, is_fragile)
  prefix = partition
  era = is_fragile == '1' and string.match(redis.call('INFO', 'replication'), 'master_replid:(%x+)') or ''
end

local function write(of, values)
  local words = {}
  for field, value in pairs(values) do
    of[field] = value
    words[#words + 1], words[#words + 2] = field, NUMBERS[field] and string.format('%.0f', value) or value
  end
  redis.call('HSET', record_of(of.name), unpack(words))
end

-- Reads a record; nil = there is none. A life of which Redis may have lost something ends.
local function load(name)
  local values, of = redis.call('HMGET', record_of(name), unpack(FIELDS)), {name = name}
  if not values[1] then return nil end
  for i, field in ipairs(FIELDS) do of[field] = NUMBERS[field] and tonumber(values[i] or 0) or values[i] or '' end
  if of.state == 'open' and era ~= '' and of.era ~= era then
    fail(of, 'sequence_lost', 'Redis was restarted or failed over, and may have lost steps of it', of.committed + 1)
  end
  return of
end

-- Has the keys of a sequence live for `ms` at least.
local function keep(name, ms)
  if redis.call('PTTL', record_of(name)) >= ms then return end
  for _, key in ipairs({record_of(name), steps_of(name), state_of(name)}) do redis.call('PEXPIRE', key, ms) end
end

-- Puts a sequence into a lane from which workers with a free slot take: `seq`, or `seq.handed`, which goes first.
local function wait_for_owner(of, lane, now)
  local id = redis.call('XADD', prefix .. of.version .. ':' .. lane, '*', 's', of.name)
  write(of, {owner = '', ticket = lane .. ' ' .. id})
  redis.call('ZADD', prefix .. 'sequences', now, of.name)
end

-- Takes a sequence from its owner, whom a ticket tells, or out of the lane in which it waits for one.
local function leave(of)
  if of.owner ~= '' then
    redis.call('SREM', prefix .. 'sequence-owned:' .. of.owner, of.name)
    redis.call('XADD', lane_of(of.version, of.owner), '*', 's', of.name, 'l', of.life, 't', of.token)
  elseif of.ticket ~= '' then
    local lane, id = string.match(of.ticket, '^(%S+) (%S+)$')
    redis.call('XDEL', prefix .. of.version .. ':' .. lane, id)
  end
end

-- Ends the life that executes: the next one begins, or the sequence has ended. What is unanswered is due after `grace` ms.
function over(of, grace)
  local record, now, gone = record_of(of.name), now_ms(), {}
  leave(of)
  redis.call('HDEL', record, 'last:' .. of.life, 'next:' .. of.life, 'fail:' .. of.life)
  drop(state_of(of.name), gone)
  redis.call('ZADD', prefix .. 'sequence-endings', now + grace, of.name)
  if of.tail == of.life then
    write(of, {state = 'ended', owner = '', ticket = ''})
    redis.call('ZREM', prefix .. 'sequences', of.name)
    return gone
  end
  local about, doom = unpack(redis.call('HMGET', record, 'next:' .. of.life + 1, 'fail:' .. of.life + 1))
  local version, generation, kind, idle = string.match(about, '^(%S+) (%S+) (%S+) (%S+)$')
  write(of, {life = of.life + 1, version = version, generation = generation, kind = kind, idle = tonumber(idle), owner = '',
    taken = 0, committed = 0, entry = '', deaths = 0, used = now, era = era})
  wait_for_owner(of, 'seq', now)
  if doom then
    local failed, code, text = string.match(doom, '^(%d+) (%S+) (.*)$')
    fail(of, code, text, tonumber(failed))
  end
  return gone
end

-- Ends the life that executes by an error, at step `n`; its unanswered steps are due at once.
function fail(of, code, text, n)
  if code == 'sequence_lost' then count('lost') end
  write(of, {code = code, text = text, failed = n, failed_life = of.life})
  return over(of, 0)
end

-- Gives a sequence to whoever has a free slot; one whose state was in its owner's memory ends. The owner has died with it,
-- or gives it back.
local function hand_over(of, has_died)
  if of.kind == 'explicit' then
    return fail(of, 'sequence_lost', 'the worker that had its state in memory has ended', of.committed + 1)
  end
  if has_died and of.taken > of.committed then write(of, {deaths = of.deaths + 1}) end
  redis.call('SREM', prefix .. 'sequence-owned:' .. of.owner, of.name)
  wait_for_owner(of, 'seq.handed', now_ms())
  count('handed_over')
  return {}
end

-- Calls `use(id, fields)` with each step in a sequence's stream, in order, until it returns false.
local function each_step(name, use)
  local start = '-'
  while start do
    local page = redis.call('XRANGE', steps_of(name), start, '+', 'COUNT', 20)
    for _, step in ipairs(page) do
      local fields = {}
      for f = 1, #step[2], 2 do fields[step[2][f]] = step[2][f + 1] end
      if use(step[1], fields) == false then return end
    end
    start = #page == 20 and '(' .. page[20][1]
  end
end
