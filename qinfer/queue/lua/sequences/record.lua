-- The record of a sequence and the steps of its life. A *life* begins with START; lives follow one another, and their
-- steps share one stream, in order.
-- The record is a hash. Its field `of` is a MessagePack table:
--   state (open | ended), number (see numbers.lua), weight (the tenant's), kept (until when the keys live, ms);
--   of the executing life: life, version, generation, kind, idle (ms), owner, token (higher for each owner), ticket,
--   committed, deaths (of workers during its next step), used (ms), era, apart (1 = the state has its own key);
--   of the last life: tail, accepted, hash (of its START), last (its last step; 0 = unknown), by and sent (the
--   gateway of its START, and how many steps that gateway had sent);
--   of a life ended by an error: code, text, failed, failed_life;
--   direct, the token of an owner that reads steps from its lane and numbers them itself: of these, `committed` and
--   `accepted` know the committed steps only. No other owner takes its lives before that lane is closed.
-- Other fields: `at`, the life and the last committed step; `state`, `answer:<life>.<n>`, a response, both unless
-- staged; `done:<entry>`, life and number of a committed step whose response may not be published; `last:<life>`, the last step of
-- a life with a successor; `next:<life>`, version, generation, kind and idle time of a waiting life; `fail:<life>`, the
-- error of a life that ends when it begins or its owner dies.
local TOMBSTONE_MS = 300000 -- an ended sequence is known this long
local LOOK_MS = 60000 -- the janitor's interval, and the idle time without owner
local GRACE_MS = 10000 -- to answer an ended life's steps
local DAY_MS = 86400000
local SLACK_MS = 3600000 -- so that few steps extend the keys' life
local SHORT_BYTES = 4096 -- larger frames do not travel with the ticket
local EMPTY = {life = 0, committed = 0, token = 0, deaths = 0, idle = 0, used = 0, tail = 0,
  accepted = 0, failed = 0, failed_life = 0, last = 0, kept = 0, apart = 0, number = 0, weight = 0, direct = 0, sent = 0, by = '', state = '', version = '', generation = '', kind = '', owner = '', ticket = '',
  era = '', hash = '', code = '', text = ''}
local RECORD = {__index = EMPTY}
local prefix, era, now
local over, fail, doom_of

local function record_of(name) return prefix .. 'sequence:' .. name end
local function steps_of(name) return prefix .. '0:steps:' .. name end
local function state_of(name) return prefix .. 'sequence-state:' .. name end
local function answer_of(name, life, n) return prefix .. string.format('sequence-answer:%d.%d:%s', life, n, name) end
local function answer_field(life, n) return string.format('answer:%d.%d', life, n) end
local function tenant_of(name) return string.match(name, '^([^:]*):') or '' end
local function number_key(number) return prefix .. string.format('sequence-number:%.0f', number) end
local function lane_of(version, worker) return prefix .. version .. ':seq@' .. worker end
local function is_direct(of) return of.direct > 0 and of.direct == of.token and of.owner ~= '' end
-- Tells whether closed lanes may have steps of the executing life, which its next owner numbers.
local function is_left(of) return of.direct > 0 and of.direct == of.token and of.owner == '' and of.kind ~= 'explicit' end
-- Tells whether the steps of a life in closed lanes are its owner's: it has read them, or the next one will.
local function is_adopters(of, life)
  return of and of.state == 'open' and of.kind ~= 'explicit' and of.life == life and (of.owner == '' or is_direct(of))
end
-- A damaged counter starts again.
local function count(what)
  local counts = prefix .. 'sequence-counts'
  if type(redis.pcall('HINCRBY', counts, what, 1)) == 'table' then
    redis.call('UNLINK', counts)
    redis.call('HSET', counts, what, 1)
  end
end

-- Sets the partition, the time, and the era: if Redis may lose confirmed writes, a sequence written before a restart or
-- failover (a new `master_replid`) is not continued.
local function begin(partition, is_fragile)
  if prefix == partition then return end
  prefix, now = partition, now_ms()
  era = is_fragile == '1' and string.match(redis.call('INFO', 'replication'), 'master_replid:(%x+)') or ''
end

-- Ended steps free memory: after this write full memory stops no script.
local function make_room() redis.call('ZREM', prefix .. 'sequence-owners', '') end

local function write(of, values, ...)
  for field, value in pairs(values) do of[field] = value end
  local name = of.name
  of.name = nil
  redis.call('HSET', record_of(name), 'of', cmsgpack.pack(of), ...)
  of.name = name
end

local function fresh(name)
  return setmetatable({name = name}, RECORD)
end

-- Tells whether known fields have the right types.
local function is_whole(of)
  for field, value in pairs(of) do
    local like = EMPTY[field]
    if like == 0 then
      if type(value) ~= 'number' or not (value >= 0 and value < 2 ^ 53 and value % 1 == 0) then return false end
    elseif like and type(value) ~= 'string' then
      return false
    end
  end
  return not string.find(of.generation or '', '%D')
end

-- Tells whether a record is of this era; all its lives are, because a START ends older ones. A record without an era
-- (of an older version, or a Redis that loses nothing) is sound if this server has run since, and was never a replica.
local function is_sound(of)
  if era == '' or of.era == era then return true end
  if of.era ~= '' then return false end
  local up_s = tonumber(string.match(redis.call('INFO', 'server'), 'uptime_in_seconds:(%d+)')) or 0
  local was_replica = not string.find(redis.call('INFO', 'replication'), 'master_replid2:0+%s')
  if was_replica or of.used <= now - up_s * 1000 then return false end
  of.era = era
  return true
end

-- Reads a record, or nil. Ends lives of which Redis may have lost steps.
local function load(name)
  local packed = redis.call('HGET', record_of(name), 'of')
  if not packed then return nil end
  local is_read, of = pcall(cmsgpack.unpack, packed)
  if not is_read or type(of) ~= 'table' or not is_whole(of) then return nil end
  of.name = name
  setmetatable(of, RECORD)
  while of.state == 'open' and not is_sound(of) do
    fail(of, 'sequence_lost', 'Redis was restarted or failed over, and may have lost steps of it')
  end
  return of
end

-- Writes a record, and extends the life of its keys to `ms`.
local function keep(of, ms)
  if of.kept - now >= ms then return write(of, {used = now}) end
  write(of, {used = now, kept = now + ms + SLACK_MS})
  for _, key in ipairs({record_of(of.name), steps_of(of.name), state_of(of.name)}) do
    redis.call('PEXPIRE', key, ms + SLACK_MS)
  end
  if of.number > 0 then redis.call('PEXPIRE', number_key(of.number), ms + SLACK_MS) end
end

local function has_answer(name, life, n)
  return redis.call('HEXISTS', record_of(name), answer_field(life, n)) == 1 or redis.call('EXISTS', answer_of(name, life, n)) == 1
end
local function drop_answer(name, life, n, gone)
  if redis.call('HDEL', record_of(name), answer_field(life, n)) == 0 then drop(answer_of(name, life, n), gone) end
end

-- Tells the owner of a step, for the `times`-th time; steps that may be finished soon have no `frame`.
local function tell(of, entry, life, n, times, frame, payload)
  local lane = lane_of(of.version, of.owner)
  local ticket = {'*', 's', of.name, 'l', life, 'n', n, 'e', entry, 't', of.token, 'times', times}
  if frame and #frame <= SHORT_BYTES then
    for _, word in ipairs({'f', frame, 'p', payload}) do ticket[#ticket + 1] = word end
  end
  if redis.call('XADD', lane, 'NOMKSTREAM', unpack(ticket)) then return end
  redis.call('XADD', lane, unpack(ticket))
  redis.call('PEXPIRE', lane, DAY_MS)
end

-- Tells the owner that another life waits behind the one that it executes; returns false if its lane is closed.
local function tell_restart(of)
  return redis.call('XADD', lane_of(of.version, of.owner), 'NOMKSTREAM', '*', 's', of.name, 'l', of.life, 't', of.token, 'r', 1)
end

local function tell_cancel(of, life, n)
  redis.call('XADD', lane_of(of.version, of.owner), 'NOMKSTREAM', '*', 's', of.name, 'l', life, 'n', n, 't', of.token, 'c', 1)
end

-- Puts a sequence into the lane `seq`, or `seq.handed`, which goes first. A tenant's wait in `<lane>~<tenant>`; a blank
-- ticket in the lane itself wakes workers. The set `sequences~<tenant>` has a tenant's open sequences, the hash
-- `sequences~` the tenants' weights.
local function wait_for_owner(of, lane)
  local tenant = tenant_of(of.name)
  if tenant ~= '' then
    local key = prefix .. of.version .. ':' .. lane
    if redis.call('XLEN', key) == 0 then redis.call('XADD', key, '*', 's', '') end
    redis.call('SADD', prefix .. 'sequences~' .. tenant, of.name)
    redis.call('HSET', prefix .. 'sequences~', tenant, math.max(of.weight, 1))
    lane = lane .. '~' .. tenant
  end
  local key = prefix .. of.version .. ':' .. lane
  local id = redis.call('XADD', key, '*', 's', of.name)
  if tenant ~= '' then redis.call('PEXPIRE', key, 7 * DAY_MS) end
  write(of, {owner = '', ticket = lane .. ' ' .. id})
  redis.call('ZADD', prefix .. 'sequences', now, of.name)
end

local function close(name)
  redis.call('ZREM', prefix .. 'sequences', name)
  local tenant = tenant_of(name)
  if tenant == '' then return end
  redis.call('SREM', prefix .. 'sequences~' .. tenant, name)
  if redis.call('EXISTS', prefix .. 'sequences~' .. tenant) == 0 then redis.call('HDEL', prefix .. 'sequences~', tenant) end
end

-- Takes a sequence from its owner, who gets a ticket, or from its lane.
local function leave(of)
  if of.owner ~= '' then
    redis.call('SREM', prefix .. 'sequence-owned:' .. of.owner, of.name)
    redis.call('XADD', lane_of(of.version, of.owner), 'NOMKSTREAM', '*', 's', of.name, 'l', of.life, 't', of.token)
  elseif of.ticket ~= '' then
    local lane, id = string.match(of.ticket, '^(%S+) (%d+%-%d+)$')
    if lane then redis.call('XDEL', prefix .. of.version .. ':' .. lane, id) end
  end
end

-- Closes an owner's lane: appends to it fail from now on, and its steps are answered from where they are.
local function close_lane(lane)
  local has_steps = redis.call('SREM', prefix .. 'sequence-lanes', lane) == 1
  if not has_steps or redis.call('XLEN', prefix .. lane) == 0 then
    return redis.call('UNLINK', prefix .. lane)
  end
  local closed, number = nil, now
  repeat -- earlier ones of this millisecond may be unanswered
    closed, number = string.format('0:closed:%s:%.0f', lane, number), number + 1
  until redis.call('RENAMENX', prefix .. lane, prefix .. closed) == 1
  redis.call('PEXPIRE', prefix .. closed, DAY_MS)
  redis.call('SADD', prefix .. 'sequence-closed', closed)
  redis.call('PEXPIRE', prefix .. 'sequence-closed', 2 * DAY_MS)
end

-- Forgets an ended sequence without steps, in five minutes.
local function forget(of)
  redis.call('UNLINK', steps_of(of.name))
  redis.call('PEXPIRE', record_of(of.name), TOMBSTONE_MS)
  redis.call('PEXPIRE', answer_of(of.name, of.life, of.committed), TOMBSTONE_MS)
end

-- Returns a stream entry's fields as a table.
local function fields_of(entry)
  local fields = {}
  for f = 1, #entry[2], 2 do fields[entry[2][f]] = entry[2][f + 1] end
  return fields
end

-- Calls `use(id, fields)` until it returns false; removes damaged steps.
local function each_step(name, use)
  local start = '-'
  while start do
    local page = redis.call('XRANGE', steps_of(name), start, '+', 'COUNT', 20)
    for _, step in ipairs(page) do
      local fields = fields_of(step)
      if not (fields.f and tonumber(fields.l) and tonumber(fields.n) and tonumber(fields.d)) then
        redis.call('XDEL', steps_of(name), step[1])
      elseif use(step[1], fields) == false then
        return
      end
    end
    start = #page == 20 and '(' .. page[20][1]
  end
end

-- Returns step, code and text of the error that ends the executing life, unless its step is committed.
function doom_of(of)
  local doom = redis.call('HGET', record_of(of.name), 'fail:' .. of.life)
  local failed, code, text = string.match(doom or '', '^(%d+) (%S+) (.*)$')
  if failed and tonumber(failed) > of.committed then return tonumber(failed), code, text end
end

-- Ends the executing life, and begins the next one. Unanswered steps are due after `grace` ms.
function over(of, grace)
  local record, gone = record_of(of.name), {}
  leave(of)
  redis.call('HDEL', record, 'last:' .. of.life, 'next:' .. of.life, 'fail:' .. of.life, 'at', 'state')
  if of.apart == 1 then drop(state_of(of.name), gone) end
  of.apart = 0
  redis.call('ZADD', prefix .. 'sequence-endings', now + grace, of.name)
  local next_life = of.life + 1
  local about = next_life <= of.tail and redis.call('HGET', record, 'next:' .. next_life)
  local version, generation, kind, idle = string.match(about or '', '^(%S+) (%d+) (%S+) (%d+)$')
  if not version then -- perhaps a damaged one
    write(of, {state = 'ended', owner = '', ticket = ''})
    close(of.name)
    if of.number > 0 then redis.call('PEXPIRE', number_key(of.number), TOMBSTONE_MS) end
    return gone
  end
  write(of, {life = next_life, version = version, generation = generation, kind = kind, idle = tonumber(idle), owner = '',
    committed = 0, deaths = 0, used = now, direct = 0})
  wait_for_owner(of, 'seq')
  local failed, code, text = doom_of(of)
  if failed then fail(of, code, text, failed) end
  return gone
end

local function first_unanswered(of)
  local first
  each_step(of.name, function(_, step)
    if tonumber(step.l) == of.life and tonumber(step.n) > of.committed then first = tonumber(step.n) end
    return not first
  end)
  return first
end

-- Fails the executing life at step `n`, by default the first without a response; unanswered steps are due at once.
function fail(of, code, text, n)
  n = n or first_unanswered(of) or (of.life == of.tail and of.accepted or of.committed) + 1
  if code == 'sequence_lost' then count('lost') end
  write(of, {code = code, text = text, failed = n, failed_life = of.life})
  return over(of, 0)
end

-- Offers the sequence of a dead or draining owner; ends it if the owner's memory had its state.
local function hand_over(of, has_died)
  if of.kind == 'explicit' then
    return fail(of, 'sequence_lost', 'the worker that had its state in memory has ended')
  end
  local failed, code, text = doom_of(of)
  if failed then return fail(of, code, text, failed) end
  if has_died and not is_direct(of) then redis.call('UNLINK', lane_of(of.version, of.owner)) end
  if has_died and (is_direct(of) or of.tail > of.life or of.accepted > of.committed) then of.deaths = of.deaths + 1 end
  redis.call('SREM', prefix .. 'sequence-owned:' .. of.owner, of.name)
  of.used = now
  wait_for_owner(of, 'seq.handed')
  count('handed_over')
  return {}
end
